"""mhc.connect_backward (internal): the backward of a whole connection, which adds pre's and post's dx in one pass."""
