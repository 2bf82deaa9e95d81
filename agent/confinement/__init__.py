"""What the kernel keeps a process from: files by Landlock, and system calls by a filter."""
