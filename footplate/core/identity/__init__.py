"""A hash of a function that changes with everything that its results depend on, for caches of results.

function_identity(tokenize)      # "9f2c…": its code, its closure, the globals that it reads, and so on through those

code_reads.py          the names that code reads
module_origin.py       where a module comes from: Python, an installed package, or a user's file
nondeterminism.py      what makes a function return other results for the same arguments
function_identity.py   the hash
"""
