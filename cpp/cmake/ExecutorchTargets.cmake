# find_executorch([REQUIRED] [COMPONENTS ...]): ExecuTorch under the target names of its wheel. An installed source build
# is found as well; its targets have other names, are static, and bring their own whole-archive options.
macro(find_executorch)
  find_package(executorch CONFIG ${ARGN})
  if(TARGET executorch AND NOT TARGET executorch::runtime)
    _name_executorch(runtime
      executorch extension_module_static extension_tensor extension_data_loader extension_flat_tensor)
    _name_executorch(threadpool extension_threadpool)
    _name_executorch(kernels_optimized optimized_native_cpu_ops_lib)
    _name_executorch(kernels_quantized quantized_ops_lib)
    _name_executorch(backend_xnnpack xnnpack_backend)
  endif()
endmacro()

# The libraries of a source build that it was not configured with are left out: where one is needed, its header or its
# symbols are missing by name.
function(_name_executorch name)
  add_library(executorch::${name} INTERFACE IMPORTED)
  foreach(library IN LISTS ARGN)
    if(TARGET ${library})
      set_property(TARGET executorch::${name} APPEND PROPERTY INTERFACE_LINK_LIBRARIES ${library})
    endif()
  endforeach()
endfunction()
