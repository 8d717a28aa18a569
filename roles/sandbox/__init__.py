"""What keeps untrusted code in its place: namespaces, Landlock, seccomp, limits. Linux; knows no reward."""
