/* A group over two others: the ranks of one machine, and machines.
 *
 * Machines have the same number of ranks each, and rank = machine * ranks_a_machine +
 * rank in the machine. Data is reduced within each machine before it crosses between
 * machines, and each of a machine's ranks sends one shard: of n bytes,
 * n / ranks_a_machine. Reductions are rounded once in a machine and once across; short
 * ones (up to 4 KiB) and means of integers are gathered and reduced in rank order
 * instead, with one rounding. */
#ifndef CORE_COMM_HIERARCHICAL_H
#define CORE_COMM_HIERARCHICAL_H

#include "core/comm/comm.h"

/* `inner` is this machine's group, `outer` the group of the ranks that have this rank's
 * place on their machines, in the machines' order; `whole` is the group of all ranks,
 * by any backend: it is used to split the group and, with `compares`, to compare all
 * ranks' requests before each collective.
 *
 * Owns all three from now on, on failure too: CT_EINVAL when their ranks do not fit
 * together, CT_ENOMEM. Released with ops->free. */
CT_NODISCARD ct_status ct_comm_hierarchical_new_steal(ct_comm **comm, ct_comm *inner,
                                                      ct_comm *outer, ct_comm *whole,
                                                      bool compares, ct_error *err);

/* The ranks of each machine; 0 for a group of another backend. */
int ct_comm_ranks_a_machine(const ct_comm *comm);

/* Runs one step of a collective that the caller makes of several: among the ranks of
 * this machine, or `across`, among the ranks that have this rank's place on their
 * machines. A collective of the whole group, with equal lengths on all ranks. */
CT_NODISCARD ct_status ct_comm_run_level(ct_comm *comm, bool across,
                                         const ct_request *request, ct_error *err);

#endif
