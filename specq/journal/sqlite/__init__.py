"""The journal in a SQLite file.

- `connection`: tables, upgrades of older files, the limit of the size, SQLite's errors as the journal's, the ownership
  (one broker at a time), and the journal's time.
- `store`: groups of records in, unfinished jobs out.
- `reader`: finished jobs and lists.
"""
