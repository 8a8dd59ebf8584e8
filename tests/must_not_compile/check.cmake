# Compiles FRAGMENT with CXX, FLAGS and the |-separated INCLUDES, and no output: it must fail, and what the compiler
# says must match the regex after "// expect: " on line 1. Without a FRAGMENT: precompiles HEADERS, the headers that
# all of them include.

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

file(STRINGS ${FRAGMENT} first LIMIT_COUNT 1)
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
