/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A preloaded stand-in for the driver: it carries the ioctls of this ABI, on any
 * file descriptor, as messages to the socket that SPANKER_BRIDGE names, and hands
 * every other ioctl to the kernel. It shows that both ways are the same requests.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include "spanker_ioctl.h"

static int line = -1;

static int move(int out, char *bytes, size_t length)
{
	while (length > 0) {
		ssize_t count = out ? write(line, bytes, length) : read(line, bytes, length);

		if (count <= 0) {
			errno = EIO;
			return -1;
		}
		bytes += count;
		length -= (size_t)count;
	}
	return 0;
}

static int connected(void)
{
	struct sockaddr_un name = { .sun_family = AF_UNIX };
	const char *path = getenv("SPANKER_BRIDGE");

	if (line >= 0)
		return 0;
	if (!path || strlen(path) >= sizeof(name.sun_path)) {
		errno = ENODEV;
		return -1;
	}
	strcpy(name.sun_path, path);
	line = socket(AF_UNIX, SOCK_STREAM, 0);
	return connect(line, (struct sockaddr *)&name, sizeof(name));
}

static int to_card(unsigned long request)
{
	return request == SPANKER_IOC_WRITE || request == SPANKER_IOC_SUBMIT;
}

static int carry(unsigned long request, void *argument)
{
	static uint64_t sequence;
	size_t size = _IOC_SIZE(request);
	/* Requests that move bytes begin with their address and length. */
	uint64_t *moved = argument;
	struct spanker_message head = {
		.magic = SPANKER_MESSAGE_MAGIC,
		.major = SPANKER_ABI_VERSION_MAJOR,
		.minor = SPANKER_ABI_VERSION_MINOR,
		.number = (__u32)request,
		.sequence = ++sequence,
		.argument = (__u32)size,
		.payload = to_card(request) ? (__u32)moved[1] : 0,
	};
	char *payload = size >= 16 ? (char *)(uintptr_t)moved[0] : NULL;

	if (connected())
		return -1;
	if (move(1, (char *)&head, sizeof(head)) || move(1, argument, size) ||
	    move(1, payload, head.payload))
		return -1;
	if (move(0, (char *)&head, sizeof(head)))
		return -1;
	if (head.status) {
		errno = head.status;
		return -1;
	}
	if (move(0, argument, head.argument) || move(0, payload, head.payload))
		return -1;
	return 0;
}

int ioctl(int fd, unsigned long request, ...)
{
	va_list arguments;
	void *argument;

	va_start(arguments, request);
	argument = va_arg(arguments, void *);
	va_end(arguments);
	if (_IOC_TYPE(request) == SPANKER_IOC_MAGIC)
		return carry(request, argument);
	return (int)syscall(SYS_ioctl, fd, request, argument);
}
