# The rooms of include/quoka, from the bottom to the top: a header includes headers of its own room and of rooms before
# it in this list, never of one after it. Shared by the install rules, by the test that reads the includes
# (tests/rooms.cmake) and, through that test, by the map in include/quoka/README.md.
set(quoka_rooms
  base         # integers, version and namespace, checks, small utilities
  simd         # packets of floats, integer products; isa/ has the only conditions on an ISA
  formats      # what a row is: where it lies, how its channels are stored
  packing      # what the kernels need of a format: rows to panels, one token's products
  matrix       # products of small matrices: one trait per instruction, its tiles, its packing
  runtime      # executors, threads, scratch memory of workers
  views        # what a caller hands in: tensors, rows, masks, selections
  kernels      # packed numbers in, packed numbers out
  cache        # an owning cache; 8-bit codes of keys
  select       # which keys: stages, selectors
  indexer      # which keys, by a model's own index heads
  attention    # over past and chunk; merging; what a selection keeps
  prefill      # one layer's loop: select, attend, append
  engine       # attention over an engine's cache, as its mask says
  methods)     # the methods to compare with; no other room includes them
