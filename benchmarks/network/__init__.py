"""Network links of a chosen rate and delay between namespaces of this machine: Linux, and root."""
