"""Plug-ins for engines and model libraries; installed as `kvtier.integration`."""

if __name__ != "kvtier.integration":
    # In a checkout the folder can be imported by its own name, too: then it holds nothing.
    __path__ = []
