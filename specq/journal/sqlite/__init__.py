"""The journal in a SQLite file.

- `schema`: tables, upgrades of older files, and the steps that keep the file within its limit.
- `connection`: connections, SQLite's errors as the journal's, the ownership (one broker at a time), and the journal's
  time.
- `store`: groups of records in, unfinished jobs out.
- `rows`: records as rows, and the reader of finished jobs and lists.
"""
