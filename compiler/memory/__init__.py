"""The peak bytes of a stage, by abstract execution of its programs."""
