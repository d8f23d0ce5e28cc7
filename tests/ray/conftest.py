"""The folder's tests import Ray, which reads its token when it is imported, so the token is set before."""

import tests.ray.cluster  # noqa: F401 - sets the token
