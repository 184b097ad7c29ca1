"""The suite ``peers``: whole models in clearhead and in the libraries that a user would pick instead."""
