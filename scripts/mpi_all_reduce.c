/* SPDX-License-Identifier: Apache-2.0 */
/* Times MPI_Allreduce in place, as the peer of the message fabric.
 * usage: mpi_all_reduce BYTES: prints the median microseconds of a call. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

enum { REPEATS = 31 };

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    int rank;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    int count = argc > 1 ? atoi(argv[1]) / (int)sizeof(float) : 0;
    if (count <= 0) {
        if (rank == 0) fprintf(stderr, "usage: mpi_all_reduce BYTES\n");
        MPI_Finalize();
        return 2;
    }
    float *data = calloc(count, sizeof(float));
    if (!data) MPI_Abort(MPI_COMM_WORLD, 1);
    int calls = count < 65536 ? 100 : 4;
    double samples[REPEATS];
    for (int repeat = -2; repeat < REPEATS; repeat++) {
        MPI_Barrier(MPI_COMM_WORLD);
        double begun = MPI_Wtime();
        for (int call = 0; call < calls; call++)
            MPI_Allreduce(MPI_IN_PLACE, data, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
        if (repeat >= 0) samples[repeat] = (MPI_Wtime() - begun) / calls * 1e6;
    }
    qsort(samples, REPEATS, sizeof(double), ascending);
    if (rank == 0) printf("%.3f\n", samples[REPEATS / 2]);
    free(data);
    MPI_Finalize();
    return 0;
}
