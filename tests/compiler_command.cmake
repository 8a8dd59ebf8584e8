# compiler_command(TO OPTION): the options that a user's compiler gets, to TO: FLAGS, and the |-separated INCLUDES, each after
# OPTION.
function(compiler_command to option)
  string(REPLACE "|" ";" includes "${INCLUDES}")
  separate_arguments(command UNIX_COMMAND "${FLAGS}")
  foreach(directory IN LISTS includes)
    list(APPEND command ${option}${directory})
  endforeach()
  set(${to} ${command} PARENT_SCOPE)
endfunction()
