"""Device kernels and the copy paths between HBM and host memory; installed as `kvtier.kernels`."""

if __name__ != "kvtier.kernels":
    # Libraries look for a package of this name and would find this folder in a checkout; empty, it
    # is none to them.
    __path__ = []
