"""Stacks of running processes, and a sentence that says what hangs.

    answering.py    in a process that may hang: answers a question for its stacks
    asking.py       in another process of the same machine: asks, with three methods, within a time limit
    requests.py     in another process, too: sends a request to a handler of the process, such as a profile
    proc.py         states and children of processes, from /proc
    snapshot.py     the answers, as plain data; readers of faulthandler's and py-spy's output
    analysis.py     the sentence: which rank is where, and which ranks wait for it
    report.py       the whole as text

Only file names, line numbers, and names of functions and threads are collected. Values of variables never are.
"""
