"""The journal in a SQLite file.

schema   tables, and how older files become the newest
fence    who owns a journal: one broker at a time
store    groups of records in, unfinished jobs out
rows     records as rows
reader   the same file for those who only look: finished jobs, lists
"""
