"""Device kernels and the copy paths between HBM and host memory; installed as `kvtier.kernels`."""

if __name__ != "kvtier.kernels":
    raise ImportError("this folder is installed as kvtier.kernels; import kvtier.kernels")
