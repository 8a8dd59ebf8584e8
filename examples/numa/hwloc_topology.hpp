// The NUMA nodes of this machine, or of one that is described, by hwloc (Debian: libhwloc-dev).
#pragma once

#include <hwloc.h>

#include <cerrno>
#include <memory>
#include <stdexcept>
#include <string>
#include <system_error>

namespace quoka_examples {

// Copies share what hwloc has found.
class HwlocTopology {
 public:
  // description: as hwloc's synthetic topologies, "numa:2 core:4 pu:1"; threads are bound to nothing then. Empty: this
  // machine. Throws std::runtime_error where hwloc cannot say or does not understand.
  explicit HwlocTopology(const std::string& description = {}) {
    hwloc_topology_t found = nullptr;
    if (hwloc_topology_init(&found) != 0) throw std::runtime_error("hwloc does not start");
    topology_.reset(found, hwloc_topology_destroy);
    if (!description.empty() && hwloc_topology_set_synthetic(found, description.c_str()) != 0)
      throw std::runtime_error("hwloc does not understand the topology \"" + description + '"');
    if (hwloc_topology_load(found) != 0) throw std::runtime_error("hwloc finds no topology");
  }

  int nodes() const { return hwloc_get_nbobjs_by_type(topology_.get(), HWLOC_OBJ_NUMANODE); }
  // Physical ones.
  int cores(int node) const {
    return hwloc_get_nbobjs_inside_cpuset_by_type(topology_.get(), cpus(node), HWLOC_OBJ_CORE);
  }
  // The calling thread, to a node's processors. Throws std::system_error where the system refuses.
  void bind(int node) const {
    if (hwloc_set_cpubind(topology_.get(), cpus(node), HWLOC_CPUBIND_THREAD) != 0)
      throw std::system_error(errno, std::generic_category(),
                              "a thread cannot be bound to NUMA node " + std::to_string(node));
  }

 private:
  hwloc_const_cpuset_t cpus(int node) const {
    return hwloc_get_obj_by_type(topology_.get(), HWLOC_OBJ_NUMANODE, static_cast<unsigned>(node))
        ->cpuset;
  }

  std::shared_ptr<hwloc_topology> topology_;
};

}  // namespace quoka_examples
