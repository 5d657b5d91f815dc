// A page that was opened from a disk may not start a worker, and the search is one. There its script runs in a frame
// that nobody sees. The frame has a global object of its own, as a worker has.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super()
      const frame = document.body.appendChild(document.createElement("iframe"))
      frame.hidden = true
      const inside = frame.contentWindow
      inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      const script = inside.document.createElement("script")
      script.src = address
      this.ready = new Promise(resolve => script.addEventListener("load", () => resolve(inside)))
      inside.document.head.append(script)
    }
    postMessage(data) {
      this.ready.then(inside => inside.dispatchEvent(new inside.MessageEvent("message", { data })))
    }
  }
}
