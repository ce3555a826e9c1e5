"""What kernels do and how changes scale them: classes, roles, shapes and factors."""
