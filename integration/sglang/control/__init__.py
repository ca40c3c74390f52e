"""The control channel of one SGLang scheduler process: HTTP in, answers from its thread."""
