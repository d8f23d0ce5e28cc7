"""The endpoints, one file per group. Each reads a request, calls the client, and answers.

Other modules make the decisions.
"""
