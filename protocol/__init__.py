"""What peers say to each other: messages, clocks, subjects, codec, limits, ports and errors."""
