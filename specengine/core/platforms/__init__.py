"""Kinds of hardware, one file each, by the names of core.registry.PLATFORMS. The interface is
core.platform.Platform; start with cuda.py."""
