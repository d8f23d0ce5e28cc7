"""The journal in a SQLite file.

schema      tables, and how older files become the newest
connection  connections, and SQLite's errors as the journal's
fence       who owns a journal: one broker at a time
times       the journal's time
store       groups of records in, unfinished jobs out
rows        records as rows
room        how much room the file takes, and how it is kept to its limit
reader      reads the same file: finished jobs, lists
"""
