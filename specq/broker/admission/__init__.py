"""What the broker lets in: by role, by share, by form.

gate     looks at each message of the front before it is handled
roles    which key may send what
limits   how much one peer may take up; bucket: a token bucket
"""
