"""What the end of a process says to whoever started it.

0  stopped cleanly        1  crashed
2  refused: the configuration cannot work, and starting again will not help
3  something it depends on could not be reached at start
"""

EXIT_OK, EXIT_CRASH, EXIT_CONFIG, EXIT_UNREACHABLE = 0, 1, 2, 3
