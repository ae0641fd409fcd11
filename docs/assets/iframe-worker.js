/* Search in pages that are opened as files, where browsers start no worker: its script runs in an empty frame instead.
   Over a server the browser's own Worker is left as it is. */
"use strict";
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const inside = this.frame.contentWindow;
      const run = (source) =>
        new Promise((done, fail) => {
          const script = inside.document.createElement("script");
          Object.assign(script, { src: source, onload: done, onerror: fail });
          inside.document.body.append(script);
        });
      inside.importScripts = (...sources) => sources.reduce((before, one) => before.then(() => run(one)), Promise.resolve());
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.ready = run(new URL(address, document.baseURI).href);
    }
    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {
      this.frame.remove();
    }
  };
}
