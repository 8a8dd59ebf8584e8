# Compiles FRAGMENT with CXX, FLAGS and the |-separated INCLUDES, and no output: it must fail, and the compiler's
# messages must match the regex after "// expect: " on line 1, and, with a "// lines: <n>" on line 2, have no more lines
# than that from g++ (COUNT_LINES; clang shows more of each line's surroundings). Without a FRAGMENT: precompiles
# HEADERS, the headers that all of them include.

separate_arguments(command UNIX_COMMAND "${FLAGS}")
string(REPLACE "|" ";" includes "${INCLUDES}")
foreach(directory IN LISTS includes)
  list(APPEND command -isystem ${directory})
endforeach()
set(ENV{LC_ALL} C)

if(NOT FRAGMENT)
  execute_process(COMMAND ${CXX} ${command} -x c++-header ${HEADERS} -o ${HEADERS}.gch COMMAND_ERROR_IS_FATAL ANY)
  return()
endif()

file(STRINGS ${FRAGMENT} head LIMIT_COUNT 2)
list(GET head 0 first)
list(GET head 1 second)
if(NOT first MATCHES "^// expect: (.+)$")
  message(FATAL_ERROR "${FRAGMENT}: line 1 is not \"// expect: <regex>\"")
endif()
set(expect "${CMAKE_MATCH_1}")
execute_process(COMMAND ${CXX} ${command} -include ${HEADERS} -fsyntax-only ${FRAGMENT}
  RESULT_VARIABLE failed ERROR_VARIABLE says)
if(NOT failed)
  message(FATAL_ERROR "${FRAGMENT} compiles, but must not")
endif()
if(NOT says MATCHES "${expect}")
  message("${says}")
  message(FATAL_ERROR "${FRAGMENT} fails as it should, but not with \"${expect}\"")
endif()
if(COUNT_LINES AND second MATCHES "^// lines: ([0-9]+)$")
  set(most ${CMAKE_MATCH_1})
  string(REGEX MATCHALL "\n" lines "${says}")
  list(LENGTH lines count)
  if(count GREATER most)
    message("${says}")
    message(FATAL_ERROR "${FRAGMENT} fails as it should, but in ${count} lines, not ${most} at most")
  endif()
endif()
