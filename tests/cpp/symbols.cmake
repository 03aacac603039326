# What the core's object files share with others, and what they ask for: cmake -DNM=nm -DARCHIVE=libmoepack.a
# -DISA_DIRECTORY=cpp/src/gemm/isa -P symbols.cmake
#
# An ISA file exports its kernel alone. Anything else, a weak symbol above all, could be picked by the linker for code
# that runs on every CPU. And nothing of the core allocates.
cmake_minimum_required(VERSION 3.28)
execute_process(COMMAND ${NM} -g -P -A ${ARCHIVE} OUTPUT_VARIABLE lines COMMAND_ERROR_IS_FATAL ANY)
string(REPLACE ";" " " lines "${lines}")
string(REPLACE "\n" ";" lines "${lines}")

file(GLOB sources ${ISA_DIRECTORY}/*.cpp)
set(checked "")
foreach(source IN LISTS sources)
  cmake_path(GET source STEM isa)
  set(exported "")
  foreach(line IN LISTS lines)
    if(line MATCHES "\\[${isa}\\.cpp\\.o(bj)?\\]: ([^ ]+) ([^U ]) ")
      list(APPEND exported "${CMAKE_MATCH_3} ${CMAKE_MATCH_2}")
    endif()
  endforeach()
  if(NOT exported)
    continue()  # not built for this processor
  endif()
  if(NOT exported MATCHES "^[RD] _ZN7moepack4gemm[0-9]+${isa}_kernelE$")
    message(SEND_ERROR "${isa}.cpp exports more than its kernel: ${exported}")
  endif()
  list(APPEND checked ${isa})
endforeach()
if(NOT "scalar" IN_LIST checked)
  message(SEND_ERROR "found no object file of scalar.cpp in ${ARCHIVE}")
endif()

set(allocating "^(malloc|calloc|realloc|free|aligned_alloc|posix_memalign|strdup|_Zn[wa].*|_Zd[la].*)$")
foreach(line IN LISTS lines)
  if(line MATCHES "\\[(.*)\\]: ([^ ]+) U" AND CMAKE_MATCH_2 MATCHES "${allocating}")
    message(SEND_ERROR "the core allocates: ${line}")
  endif()
endforeach()
message(STATUS "checked: ${checked}")
