// Empty: only the name of the library it becomes matters.
