"""Small tools that several parts of the assay share; they import nothing of the assay."""
