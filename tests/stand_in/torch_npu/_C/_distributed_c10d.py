class ProcessGroupHCCL:
    class Options:
        _timeout = None

    def __init__(self, store, rank, size, options):
        self.made_with = store, rank, size, options._timeout
