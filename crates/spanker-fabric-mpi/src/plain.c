/* SPDX-License-Identifier: Apache-2.0 */
/* Plain MPI from C: what a C program would call, timed in C. And constants that only the header knows. */
#include <mpi.h>

const void *const spanker_in_place = MPI_IN_PLACE;

/* Runs `calls` all-reduces of floats in place. `seconds` is how long they took. Returns MPI's code. */
int spanker_plain_allreduce(void *data, int count, int calls, MPI_Comm comm, double *seconds) {
    double begun = MPI_Wtime();
    for (int call = 0; call < calls; call++) {
        int code = MPI_Allreduce(MPI_IN_PLACE, data, count, MPI_FLOAT, MPI_SUM, comm);
        if (code != MPI_SUCCESS) return code;
    }
    *seconds = MPI_Wtime() - begun;
    return MPI_SUCCESS;
}
