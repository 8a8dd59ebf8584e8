# Compiles FRAGMENT with CXX, FLAGS and the |-separated INCLUDES, and no output: it must fail, and what the compiler
# says must match the regex after "// expect: " on line 1.

file(STRINGS ${FRAGMENT} first LIMIT_COUNT 1)
if(NOT first MATCHES "^// expect: (.+)$")
  message(FATAL_ERROR "${FRAGMENT}: line 1 is not \"// expect: <regex>\"")
endif()
set(expect "${CMAKE_MATCH_1}")

separate_arguments(command UNIX_COMMAND "${FLAGS}")
string(REPLACE "|" ";" includes "${INCLUDES}")
foreach(directory IN LISTS includes)
  list(APPEND command -isystem ${directory})
endforeach()
set(ENV{LC_ALL} C)

execute_process(COMMAND ${CXX} ${command} -fsyntax-only ${FRAGMENT}
  RESULT_VARIABLE failed ERROR_VARIABLE says)
if(NOT failed)
  message(FATAL_ERROR "${FRAGMENT} compiles, but must not")
endif()
if(NOT says MATCHES "${expect}")
  message("${says}")
  message(FATAL_ERROR "${FRAGMENT} fails as it should, but not with \"${expect}\"")
endif()
