"""The journal in a PostgreSQL database, for several brokers at a time.

- `address`: the journal's address, without passwords, and with TLS to other machines.
- `session`: a connection that is opened again after errors, with a limit for each wait.
- `schema`: tables and their versions. `functions`: what is done in one transaction.
- `group`: a group of records as arguments of a function.
- `store`: the journal. `reader`: its reader.
"""

from specq.protocol import ConfigError
from specq.runtime import how_to_install

try:
    import psycopg  # noqa: F401 - the modules here need it
except ImportError as error:  # the package, or PostgreSQL's library
    raise ConfigError(f"{how_to_install('psycopg')} ({error})") from None
