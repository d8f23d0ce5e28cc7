"""The journal in a SQLite file.

schema      tables, how older files become the newest, and how the file is kept to its limit
connection  connections, SQLite's errors as the journal's, who owns a journal (one broker at a time), and its time
store       groups of records in, unfinished jobs out
rows        records as rows, and what reads them: finished jobs, lists
"""
