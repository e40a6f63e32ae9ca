/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A preloaded stand-in for the driver: it answers the ioctls of this ABI on any
 * file descriptor and hands every other ioctl to the kernel. It is a test aid,
 * not an emulated card: it keeps no state.
 *
 * With SPANKER_FAKE_ERRNO set, every request of this ABI fails with that errno.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "spanker_ioctl.h"

static int answer(unsigned long request, void *argument)
{
	const char *forced = getenv("SPANKER_FAKE_ERRNO");

	if (forced) {
		errno = atoi(forced);
		return -1;
	}
	if (request == SPANKER_IOC_PING) {
		/* A request without data must not carry a stray address. */
		if (argument) {
			errno = EINVAL;
			return -1;
		}
		return 0;
	}
	if (request == SPANKER_IOC_GET_VERSION) {
		/*
		 * Four different values, none of them this header's own, show that
		 * the caller reads each field from here. A full reserved field
		 * shows that the caller ignores it.
		 */
		*(struct spanker_version *)argument = (struct spanker_version){
			.major = 7, .minor = 8, .patch = 9, .reserved = 0xFFFF,
		};
		return 0;
	}
	errno = ENOTTY;
	return -1;
}

int ioctl(int fd, unsigned long request, ...)
{
	va_list arguments;
	void *argument;

	va_start(arguments, request);
	argument = va_arg(arguments, void *);
	va_end(arguments);

	if (_IOC_TYPE(request) == SPANKER_IOC_MAGIC)
		return answer(request, argument);
	return (int)syscall(SYS_ioctl, fd, request, argument);
}
