"""Plug-ins for engines and model libraries; installed as `kvtier.integration`."""

if __name__ != "kvtier.integration":
    raise ImportError("this folder is installed as kvtier.integration; import kvtier.integration")
