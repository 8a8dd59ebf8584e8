# What a program does not name is not compiled, headers alone: NM of two objects of layer.cpp, DEFAULT and ASKED.
cmake_minimum_required(VERSION 3.21)

execute_process(COMMAND ${NM} -C ${DEFAULT} OUTPUT_VARIABLE by_default COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND ${NM} -C ${ASKED} OUTPUT_VARIABLE asked COMMAND_ERROR_IS_FATAL ANY)
if(NOT by_default MATCHES "FloatPanels::attend")
  message(FATAL_ERROR "no attention in ${DEFAULT}: the test looks at the wrong files")
endif()
foreach(code "FixedPanels" "pack_fixed_" "QuokaScorer::softmax_score" "MassStages<" "QuokaScorer::select_by_levels"
    "BlockLevels::append")
  if(by_default MATCHES "${code}")
    message(SEND_ERROR "${code} is compiled, and nobody asked for it")
  endif()
  if(NOT asked MATCHES "${code}")
    message(SEND_ERROR "${code} is not compiled where it is asked for: has it another name?")
  endif()
endforeach()
