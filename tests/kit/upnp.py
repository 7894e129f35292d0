"""A router's side of UPnP: it is found, says its address, and forwards a port if it is asked to."""

import re
import socket
import socketserver
import threading
from http.server import BaseHTTPRequestHandler

GROUP = "239.255.255.250"
SSDP_PORT = 1900
HTTP_PORT = 5000
DEVICE, SERVICE = (f"urn:schemas-upnp-org:{one}:1" for one in ("device:{}", "service:{}"))
CONNECTION = SERVICE.format("WANIPConnection")
DESCRIPTION = f"""<?xml version="1.0"?>
<root xmlns="urn:schemas-upnp-org:device-1-0"><device>
<deviceType>{DEVICE.format("InternetGatewayDevice")}</deviceType><deviceList><device>
<deviceType>{DEVICE.format("WANDevice")}</deviceType><deviceList><device>
<deviceType>{DEVICE.format("WANConnectionDevice")}</deviceType><serviceList><service>
<serviceType>{CONNECTION}</serviceType><controlURL>/control</controlURL>
<eventSubURL>/events</eventSubURL><SCPDURL>/service.xml</SCPDURL>
</service></serviceList></device></deviceList></device></deviceList></device></root>"""
ANSWER = """<?xml version="1.0"?><s:Envelope xmlns:s="http://schemas.xmlsoap.org/soap/envelope/"
s:encodingStyle="http://schemas.xmlsoap.org/soap/encoding/"><s:Body>
<u:{action}Response xmlns:u="{service}">{content}</u:{action}Response></s:Body></s:Envelope>"""


def be_gateway(inside, outside, pipe):
    """Answer one network, at an address inside, until the process is ended.

    What it is asked to do, and for which port, goes through the pipe, and is answered after a reply to that.
    """
    told = {
        "GetStatusInfo": "<NewConnectionStatus>Connected</NewConnectionStatus><NewUptime>9</NewUptime>",
        "GetExternalIPAddress": f"<NewExternalIPAddress>{outside}</NewExternalIPAddress>",
    }

    class Control(BaseHTTPRequestHandler):
        def do_GET(self):
            self._answer(DESCRIPTION)

        def do_POST(self):
            action = self.headers["SOAPAction"].strip('"').partition("#")[2]
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            if port := re.search(r"<NewExternalPort>(\d+)<", body):
                pipe.send((action, int(port[1])))
                pipe.recv()
            self._answer(ANSWER.format(action=action, service=CONNECTION, content=told.get(action, "")))

        def _answer(self, text):
            self.send_response(200)
            self.send_header("Content-Type", "text/xml")
            self.send_header("Content-Length", f"{len(text)}")
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_):
            pass

    control = socketserver.TCPServer((inside, HTTP_PORT), Control)
    threading.Thread(target=control.serve_forever, daemon=True).start()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as searches:
        searches.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        searches.bind(("", SSDP_PORT))
        group = socket.inet_aton(GROUP) + socket.inet_aton(inside)
        searches.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, group)
        pipe.send("listens")
        while True:
            search, caller = searches.recvfrom(2048)
            if (target := re.search(rb"(?im)^ST: *(\S+)", search)) and b"Gateway" in target[1]:
                kind = target[1].decode()
                found = f"HTTP/1.1 200 OK\r\nST: {kind}\r\nUSN: uuid:1::{kind}\r\n"
                where = f"EXT:\r\nLOCATION: http://{inside}:{HTTP_PORT}/\r\n\r\n"
                searches.sendto((found + where).encode(), caller)
