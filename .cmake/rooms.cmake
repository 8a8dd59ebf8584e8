# The rooms of include/quoka, from the bottom to the top: a header includes headers of its own room and of rooms before
# it in this list, never of one after it. Shared by the install rules, by the test that reads the includes
# (tests/rooms.cmake) and, through that test, by the map in include/quoka/README.md.
set(quoka_rooms
  base         # integers, version and namespace, checks, small utilities
  simd         # packets of floats, integer products; isa/ has the only conditions on an ISA
  runtime      # executors, threads, scratch memory of workers
  rows         # what a caller hands in: formats, layouts, pages, lists, masks, selections
  kernels      # packed numbers in, packed numbers out; what they need of a format
  select       # which keys: stages, selectors, 8-bit codes of keys
  attention    # over past and chunk; merging; what a selection keeps
  layer        # one layer's cache and its loop: select, attend, append
  engine       # attention over an engine's cache, as its mask says
  methods)     # the methods to compare with, a model's own index heads; no other room includes them
