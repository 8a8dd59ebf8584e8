# quoka_bench --tune runs on a few keys and prints what it must: PROGRAM. Times are not looked at.
cmake_minimum_required(VERSION 3.21)

if(NOT EXISTS ${PROGRAM})
  message("quoka_bench is not built: skipped")
  return()
endif()

function(run expected)  # the status, and the arguments; what it prints goes to `says`
  execute_process(COMMAND ${PROGRAM} ${ARGN} RESULT_VARIABLE status OUTPUT_VARIABLE out ERROR_VARIABLE error)
  if(NOT status EQUAL expected)
    message(FATAL_ERROR "quoka_bench ${ARGN}: returned ${status}, not ${expected}\n${out}${error}")
  endif()
  set(says "${out}${error}" PARENT_SCOPE)
endfunction()
function(expect what)
  if(NOT says MATCHES "${what}")
    message(FATAL_ERROR "not printed: ${what}\n${says}")
  endif()
endfunction()

run(0 --tune --tune_keys=64 --tune_seconds=0.1)
expect("^[^\n]+, quoka [0-9.]+, [^\n]+ lanes\n")  # the machine and the build
set(ratio "[0-9.]+ \\([0-9.]+ to [0-9.]+\\)")
foreach(value block_keys max_panels_per_task token_block_keys token_stretch_keys token_value_keys token_prefetch_keys
    token_together_keys score_prefetch_tiles sketch_prefetch_pairs code_row_prefetch_keys top_k_samples mass_weight_bytes)
  # The default and what it trades, the work, the default again, two other candidates, a row of the table.
  set(other "\n +[0-9]+  ${ratio}(  better)?")
  expect("\n${value}: [0-9]+ by default. More / less: [^\n]+ / [^\n]+\n  [^\n]+ keys, [0-9]+ rounds[^\n]*\n +[0-9]+  ${ratio}  the default again${other}${other}")
  expect("\n${value} +[0-9]+  (the default|[0-9]+ +) +[0-9.]+\n")
endforeach()

run(0 --tune=top_k --tune_keys=64 --tune_seconds=0.1)
expect("\ntop_k_samples: ")
if(says MATCHES "block_keys")
  message(FATAL_ERROR "--tune=top_k tries others, too\n${says}")
endif()

run(0 --help)
expect("--tune \\[NAME\\].*--tune_keys.*--benchmark_filter")
run(2 --tune=no_such_value)
expect("no value's name contains \"no_such_value\"")
run(2 --tune --tune_keys=63)
run(2 --tune --tune_seconds=soon)
run(2 --tune --benchmark_filter=x)
