"""kvtier inside an unforked SGLang: labels, eviction order, host pool, control channel."""
