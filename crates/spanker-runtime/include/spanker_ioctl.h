/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The ioctl ABI of a Spanker card's control device, shared by the driver and by
 * every program that opens the device. It holds numbers and layouts only: what a
 * request means to the card is documented at each request, and no function is
 * declared here.
 *
 * Fields have fixed widths and no implicit padding, so that 32-bit and 64-bit
 * programs see the same bytes.
 */
#ifndef SPANKER_IOCTL_H
#define SPANKER_IOCTL_H

#include <linux/ioctl.h>
#include <linux/types.h>

/* The type byte that every request of this ABI carries. */
#define SPANKER_IOC_MAGIC 0xE3

/* The version that this header describes; a driver answers with its own. */
#define SPANKER_ABI_VERSION_MAJOR 0
#define SPANKER_ABI_VERSION_MINOR 1
#define SPANKER_ABI_VERSION_PATCH 0

/* The answer to SPANKER_IOC_GET_VERSION: 8 bytes. */
struct spanker_version {
	__u16 major;
	__u16 minor;
	__u16 patch;
	__u16 reserved; /* Pads to 8 bytes; the driver writes 0, readers ignore it. */
};

/* Returns 0 when the driver is alive. It carries no data. */
#define SPANKER_IOC_PING _IO(SPANKER_IOC_MAGIC, 1)

/* Fills in the version of the ABI that the driver speaks. */
#define SPANKER_IOC_GET_VERSION _IOR(SPANKER_IOC_MAGIC, 2, struct spanker_version)

#endif /* SPANKER_IOCTL_H */
