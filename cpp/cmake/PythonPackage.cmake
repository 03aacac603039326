# Where a Python package lies, without importing it.
function(find_python_package name result)
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -c
            "import importlib.util as u; print(u.find_spec('${name}').submodule_search_locations[0])"
    OUTPUT_VARIABLE location OUTPUT_STRIP_TRAILING_WHITESPACE
    ERROR_QUIET RESULT_VARIABLE failed)
  if(failed)
    message(FATAL_ERROR "moepack: the Python package '${name}' is not installed for ${Python_EXECUTABLE}. "
                        "Install the packages listed under [build-system] in pyproject.toml.")
  endif()
  set(${result} "${location}" PARENT_SCOPE)
endfunction()
