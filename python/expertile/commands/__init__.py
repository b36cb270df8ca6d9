"""The commands of `expertile`: one module a family, each with `add(subparsers)`."""
