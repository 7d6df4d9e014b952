/* The record shared by the request program and its loader (mod.rs). Only add at the end. */
#ifndef DORMOUSE_REQUEST_RECORD_H
#define DORMOUSE_REQUEST_RECORD_H

/* A request: an entry of the output of dm_request_read. The program has no map, so nothing can be full. */
struct dm_request {
	__u64 listener; /* cookie of the listening socket (SO_COOKIE) */
	__u32 address[4]; /* of this side; by IPv4 the first alone */
	__u32 peer[4];
	__u16 family; /* AF_INET or AF_INET6 */
	__u16 port; /* of this side */
	__be16 peer_port;
	__u16 segment_bytes; /* largest segment that the peer takes */
	__u32 sent; /* initial sequence number of this side */
	__u32 received; /* and of the peer */
	__u32 stamp_offset; /* of our clock of time stamps, from the monotonic clock */
	__u8 scale_sent; /* window scales, of what is sent and of what is received */
	__u8 scale_received;
	__u8 scales; /* 0 or 1, as all that follow: the options that were negotiated */
	__u8 selective;
	__u8 timestamps;
	__u8 microseconds; /* the unit of the time stamps; else milliseconds */
	__u8 acknowledged; /* the last segment of the handshake has arrived, without data */
	__u8 reserved[5];
};

#endif
