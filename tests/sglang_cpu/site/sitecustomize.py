"""Runs at the start of every Python process that has this folder on PYTHONPATH.

SGLang's server spawns its scheduler and detokenizer as fresh interpreters, which import torchvision
before any SGLang plug-in is loaded; this is the one place that reaches all of them.
"""

import torchvision_schemas

torchvision_schemas.install()
