# Writes one unit that holds several test files, each in a namespace of its own, after all headers that they include: what
# takes the compiler's time is headers, and templates that several files instantiate.
#   cmake -D UNIT=FILE.cpp -D "SOURCES=A_test.cpp|B_test.cpp" -P fold.cmake
string(REPLACE "|" ";" SOURCES "${SOURCES}")
set(includes "")
set(files "")
foreach(source IN LISTS SOURCES)
  cmake_path(GET source STEM name)
  # With the conditions under which a file includes them.
  file(STRINGS ${source} included REGEX "^#(include|if|el|endif)")
  list(APPEND includes ${included})
  string(APPEND files "namespace in_${name} {\n#include \"${source}\"\n}\n")
endforeach()
list(JOIN includes "\n" includes)
file(WRITE ${UNIT} "${includes}\n${files}")
