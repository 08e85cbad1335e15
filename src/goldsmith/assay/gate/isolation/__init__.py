"""Isolation: candidates run in child processes, which a zygote forks; a judge talks to each over a private socket."""
