"""Architectures of several libraries at tiny sizes, and the comparison of each on ranks with one device."""
